"""What the GPU benchmarks share: the operators, timing by turns, memory, and the results file."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import time

import torch

GIB = float(1 << 30)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load_ops(library):
    torch.ops.load_library(library)
    torch.backends.cuda.matmul.allow_tf32 = False


def options_of(op, **options):
    """Those of the options that an operator takes, or None if it lacks one."""
    names = {a.name for a in getattr(torch.ops.leeway, op).default._schema.arguments}
    return options if set(options) <= names else None


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20,
                              cwd=ROOT).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def context(method):
    """Where and how: the first entry of every results file."""
    dirty = _output("git", "status", "--porcelain", "--untracked-files=no")
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": os.environ.get("COMMIT") or (_output("git", "rev-parse", "HEAD") or "unknown")
        + (" with changes" if dirty else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "method": method,
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version",
                                  "--format=csv,noheader").split("\n")[0]
    for module in ("transformers", "triton"):
        try:
            found[module] = __import__(module).__version__
        except Exception:
            pass
    return found


def write(path, results):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".tmp", "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    os.replace(path + ".tmp", path)


def add(results, path, name, rows, failure):
    """Rows of a part, and what went wrong in it, which is said too; the file is written anew."""
    results["rows"] += rows
    if failure:
        results["failures"][name] = failure
        print(f"  {name}: {failure}", flush=True)
    write(path, results)


class Contender:
    def __init__(self, name, run, reset=None):
        self.name, self.run = name, run
        self.reset = reset or (lambda: None)  # not timed or counted
        self.times, self.peak_bytes, self.failure = [], 0, ""

    def median(self):
        return statistics.median(self.times) if self.times else float("nan")

    def spread(self):
        return (max(self.times) - min(self.times)) / self.median() if self.times else float("nan")

    def once(self):
        """Milliseconds of the device."""
        self.reset()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        self.run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def measure(contenders, rounds=7, warm_ups=2):
    """By turns, everyone once in a round, so that clocks and temperature are everyone's. Peak
    memory is of the last warm-up, counted from what is allocated before it."""
    for contender in contenders:
        try:
            for _ in range(warm_ups):
                contender.reset()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                contender.run()
                torch.cuda.synchronize()
                contender.peak_bytes = torch.cuda.max_memory_allocated() - before
            contender.reset()
        except Exception as error:  # a failing contender is a result, not the end of the run
            contender.failure = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"  {contender.name}: {contender.failure}", flush=True)
            torch.cuda.empty_cache()
    for _ in range(rounds):
        for contender in contenders:
            if not contender.failure:
                contender.times.append(contender.once())
    for contender in contenders:
        contender.reset()


def in_a_row(run, calls=20, repeats=5):
    """Medians of `repeats`: milliseconds of the device and of the wall for one of `calls` calls."""
    for _ in range(3):
        run()
    device, wall = [], []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        wall.append((time.perf_counter() - start) * 1e3 / calls)
        device.append(begin.elapsed_time(end) / calls)
    return statistics.median(device), statistics.median(wall)


def table(title, columns, rows):
    """Text for the end of a run. `columns` are (key, heading, format)."""
    def cell(row, key, form):
        value = row.get(key)
        if value is None or value != value:
            return "-"
        return format(value, form)

    cells = [[heading for _, heading, _ in columns]]
    cells += [[cell(row, key, form) for key, _, form in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [title]
    for line in cells:
        first = line[0].ljust(widths[0])
        lines.append("  " + "  ".join([first] + [c.rjust(w) for c, w in zip(line[1:], widths[1:])]))
    return "\n".join(lines)
