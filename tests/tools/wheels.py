"""Tiny wheels for a folder that stands in for an index."""

import zipfile


def wheel(folder, name, version, requires=(), *, tag="py3-none-any", python=""):
    """A wheel of one module that is called as the package is; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    stem = f"{module}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in requires] + ([f"Requires-Python: {python}"] if python else [])
    parts = {
        f"{module}.py": f"__version__ = {version!r}\n",
        f"{stem}.dist-info/METADATA": "\n".join(lines) + "\n",
        f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    parts[f"{stem}.dist-info/RECORD"] = "".join(f"{part},,\n" for part in [*parts, f"{stem}.dist-info/RECORD"])
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as file:
        for part, text in parts.items():
            file.writestr(part, text)
    return path
