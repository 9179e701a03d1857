"""What the threads of small.cu copy into shared memory, run as plain C++ for each thread, against the stage's layout.

The kernel finds a thread's addresses once and steps through them; the layout here is written down place by place.
"""

import re
import shutil
import subprocess

import numpy as np
import pytest

from blockshock_lib.kernels.sparse24 import small
from blockshock_lib.kernels.sparse24.small import Config

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

VALUES, METADATA, X = 1 << 40, 2 << 40, 3 << 40  # where they would lie
CASES = [  # config, eights, n, k, rows, columns between two rows of x
    (Config(1, 1, 1, 3, 8), 1, 64, 4096, 5, 0),
    (Config(1, 1, 2, 4, 2), 8, 192, 320, 61, 72),
    (Config(1, 2, 1, 3, 1), 3, 320, 192, 24, 0),
    (Config(1, 2, 2, 3, 2), 2, 256, 1088, 9, 8),
    (Config(2, 2, 1, 3, 4), 16, 320, 1088, 128, 0),
    (Config(1, 4, 1, 3, 8), 8, 576, 2048, 64, 16),
    (Config(2, 4, 1, 2, 1), 5, 1088, 64, 33, 0),
    (Config(1, 4, 1, 3, 2), 8, 65536, 65536, 64, 0),  # 2^32 weights
    (Config(2, 2, 1, 4, 1), 4, 64, 1 << 26, 25, 0),
]

HEAD = """
#include <algorithm>
#include <cstddef>
#include <cstdio>
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
struct Place { int x, y; };
static Place threadIdx, blockIdx;
static void copy16(u32 to, const char* from, bool inside) {
    const u64 copy[3] = {to, (u64)from, inside};
    fwrite(copy, 8, 3, stdout);
}
"""
CASE = """
namespace case%(number)d {
constexpr int TILES = %(tiles)d, WARPGROUPS = %(warpgroups)d, UNROLL = %(unroll)d;
constexpr int SPLIT = %(split)d, EIGHTS = %(eights)d;
%(constants)s
static void stage(const char* values, const char* metadata, const char* x, int n, int k, int batch, int x_stride,
                  int slot, int number) {
    const u32 base = 0;
    %(body)s
    if (from + number * COLS < to) load(slot, from + number * COLS);
}
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    source = small.SOURCE.read_text(encoding="utf-8")
    constants = re.findall(r"^constexpr int (?:ROWS|X_AT) = .*;$", source, re.MULTILINE)  # the sizes that it derives
    assert len(constants) == 2
    # What stands between its first line that asks for the thread and its sums.
    body = source[source.index("    const int tid =") : source.index("    float sums[TILES]")]
    text, calls = HEAD, ""
    for number, (config, eights, *_) in enumerate(CASES):
        sizes = config._asdict() | {"eights": eights, "number": number}
        text += CASE % (sizes | {"constants": "\n".join(constants), "body": body})
        calls += f"if (a[0] == {number}) case{number}::stage(w, m, x, a[1], a[2], a[3], a[4], a[5], a[6]);\n"
    text += f"""
int main(int, char** words) {{
    int a[10];
    for (int i = 0; i < 10; i++) sscanf(words[1 + i], "%d", a + i);
    const char *w = (const char*){VALUES}ull, *m = (const char*){METADATA}ull, *x = (const char*){X}ull;
    blockIdx = {{a[7], a[8]}};
    for (int thread = 0; thread < a[9]; thread++) {{
        threadIdx = {{thread, 0}};
        {calls}
    }}
}}
"""
    folder = tmp_path_factory.mktemp("copies")
    (folder / "copies.cpp").write_text(text)
    subprocess.run([COMPILER, "-std=c++17", "-w", "copies.cpp", "-o", "copies"], cwd=folder, check=True)
    return folder / "copies"


def wanted(config, eights, n, k, rows, stride, block, part, number) -> dict[int, tuple[int, bool]]:
    """Place in the stage -> the address that belongs there, and whether it is read."""
    blocks, height, columns = k // 64, config.rows, 128 * config.unroll
    first, end = (blocks * (part + i) // config.split * 64 for i in (0, 1))
    start, found, at = first + number * columns, {}, 0
    for slab in range(config.unroll):  # of 64 values, 128 bytes: the swizzle's width
        for row in range(height):
            for piece in range(8):
                column = start + 128 * slab + 16 * (piece ^ row & 7)  # of the dense weight, a byte each
                source = VALUES + min(block * height + row, n - 1) * k + (column if column < end else 0)
                found[at] = source, column < end
                at += 16
    for slab in range(2 * config.unroll):  # of x, 64 values too
        for row in range(8 * eights):
            for piece in range(8):
                column = start + 64 * slab + 8 * (piece ^ row & 7)
                inside = column < end and row < rows
                found[at] = X + 2 * (row * stride + column) * inside, inside
                at += 16
    for tile in range(height // 64):
        for piece in range(columns // 2):  # 16 bytes for two columns of 64 rows
            column = start + 2 * piece
            column = column if column < end else 2 * (piece % 16)
            found[at] = METADATA + (min(block * height // 64 + tile, n // 64 - 1) * k + column) * 8, True
            at += 16
    return found


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_place_of_a_stage_is_filled_once_and_by_what_belongs_there(program, number):
    config, eights, n, k, rows, gap = CASES[number]
    last = -(-n // config.rows) - 1
    stage = config.shared(eights) // config.depth
    for block in {0, last}:
        for part in {0, config.split - 1}:
            share = k // 64 * (part + 1) // config.split * 64 - k // 64 * part // config.split * 64
            stages = -(-share // (128 * config.unroll))
            for step in {0, stages - 1, stages}:
                slot = step % config.depth
                numbers = (number, n, k, rows, k + gap, slot, step, block, part, 128 * config.warpgroups)
                out = subprocess.run([program, *map(str, numbers)], capture_output=True, check=True).stdout
                copies = np.frombuffer(out, np.uint64).reshape(-1, 3).tolist()
                if step == stages:
                    assert not copies
                    continue
                got = {to - slot * stage: (source, bool(inside)) for to, source, inside in copies}
                assert len(got) == len(copies) and len(got) * 16 == stage
                assert got == wanted(config, eights, n, k, rows, k + gap, block, part, step)
