"""What the README says was seen to work."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_for_ones_own_model_runs_on_two_ranks(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    script = tmp_path / "own_model.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Packed: 9/16 of the 8 MiB of the dense weight, on each rank; the outputs are of order 1.
    for rank in (0, 1):
        (found,) = re.findall(rf"rank {rank}: (\d+) bytes, largest difference ([\d.]+)", done.stdout)
        assert int(found[0]) == 1024 * 4096 * 2 * 9 // 16 and float(found[1]) < 0.05


def test_every_linked_file_exists():
    linked = re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT)
    assert len(linked) >= 4
    assert not [path for path in linked if not (ROOT / path).exists()]


def test_every_make_target_named_exists():
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)\b", TEXT)) - {"ARGS"}
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert named and named <= targets
