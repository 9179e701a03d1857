"""Tiny wheels for a folder that stands in for an index."""

import zipfile


def wheel(folder, name, version, requires=(), *, tag="py3-none-any"):
    """A wheel of one module that is called as the package is; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    stem = f"{module}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    about = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    parts = {"METADATA": "\n".join(lines) + "\n", "WHEEL": about, "RECORD": ""}
    parts = {f"{stem}.dist-info/{part}": text for part, text in parts.items()}
    parts[f"{module}.py"] = f"__version__ = {version!r}\n"
    parts[f"{stem}.dist-info/RECORD"] = "".join(f"{part},,\n" for part in parts)
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as file:
        for part, text in parts.items():
            file.writestr(part, text)
    return path
