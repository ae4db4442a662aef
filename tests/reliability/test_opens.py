"""Every place in the package that opens, reads, writes or removes a file: a new one goes through `usfan.files`, or is
added here with the reason why it may do without."""

import ast
from collections import Counter
from pathlib import Path

import usfan

ROOT = Path(usfan.__file__).parent
NAMES = {
    "open",
    "save_file",
    "load_file",
    "safe_open",
    "loadmat",
    "SummaryWriter",
    "read_bytes",
    "read_text",
}
CALLS = {
    *(
        f"os.{name}"
        for name in (
            "open",
            "fdopen",
            "unlink",
            "remove",
            "rename",
            "replace",
            "rmdir",
            "mkdir",
        )
    ),
    *(
        f"tempfile.{name}"
        for name in ("mkstemp", "TemporaryFile", "NamedTemporaryFile", "mkdtemp")
    ),
    *(
        "gzip.open",
        "bz2.open",
        "gzip.decompress",
        "bz2.decompress",
        "zipfile.ZipFile",
        "np.load",
        "np.fromfile",
    ),
    *(
        "np.loadtxt",
        "torch.load",
        "torch.save",
        "Image.open",
        "mmap.mmap",
        "shutil.rmtree",
        "shutil.copyfileobj",
    ),
    *("yaml.safe_load", "yaml.load", "json.load"),
}
METHODS = {
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "unlink",
    "savefig",
    "symlink_to",
    "rmdir",
    "touch",
}

ALLOWED = {
    "files.py": "the one way",
    "tensor_file.py": "the one way, for tensors: by descriptor",
    "config.py read_bytes": "the package's own presets",
    "data/row_cache.py open": "the cache: a part that `Folder.replacing` made",
    "data/images.py open": "the user's images, for their digest: 1 MiB of each",
    "data/decoding/decode.py open": "the user's images: a regular file of bounded size",
    "data/decoding/decode.py Image.open": "bytes that were read",
    "data/decoding/process.py os.open": "/dev/null",
    "data/decoding/process.py os.fdopen": "its own standard output",
    "data/shards.py open": "a shard that the user named: a regular file, of which headers are read",
    "data/shards.py tarfile.open": "the same, with bounds",
    "data/memory.py read_text": "/proc and /sys",
    "data/benchmarks/archives.py open": "published archives that the user has, to compare sizes",
    "data/benchmarks/archives.py zipfile.ZipFile": "to compare sizes",
    "data/benchmarks/archives.py np.load": "after the sizes were compared",
    "data/benchmarks/archives.py np.fromfile": "published archives: as large as the file",
    "data/benchmarks/archives.py loadmat": "after the sizes were compared",
    "data/benchmarks/catalogue.py read_text": "the package's own",
    "data/lists.py read_text": "by `read_named`",
    "data/few_labels.py read_text": "by `read_named`",
    "models/torch_file.py zipfile.ZipFile": "after the sizes were compared",
    "models/torch_file.py path.open": "weights that the user named",
    "adaptation/check.py guard.open": "no file",
    "adaptation/run.py self.guard.open": "no file",
    "adaptation/several.py guard.open": "no file",
    "cli/edges.py webbrowser.open": "a page of this machine, for the user",
    "metrics/predictions.py open": "a part that `whole_file` made",
    "metrics/predictions.py tempfile.TemporaryFile": "unnamed",
    "report/page.py read_text": "the package's own",
    "study/tables.py read_text": "the package's own",
    "study/digits.py gzip.decompress": "a file of an installed package",
    "study/digits.py read_bytes": "a file of an installed package",
    "study/digits.py np.loadtxt": "bytes that were read",
    "study/toy_figure.py savefig": "to a part that `whole_file` made",
    "study/suite.py shutil.rmtree": "the folder of features that this study made",
    "study/command.py Suite.open": "no file",
    "study/cluster.py Suite.open": "no file",
    "store/run_folder.py os.rmdir": "relative to the folder's descriptor",
    "store/run_folder.py rmdir": "what this run made itself",
    "store/run_folder.py unlink": "what this run made itself",
    "cli/ending.py os.open": "/dev/null",
    "cli/ending.py os.fdopen": "standard error",
}
"""File, and the call in it, or the file alone: why it is no way out."""


def calls(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in NAMES | CALLS or name.endswith(".open"):
            found.append(name)
        elif method in METHODS and name.split(".")[0] != "folder":
            found.append(method)
    return found


def test_every_open_is_known():
    unknown = Counter()
    used = set()
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for call in calls(path):
            key = place if place in ALLOWED else f"{place} {call}"
            if key not in ALLOWED and call == "folder.open":
                continue  # of `usfan.files.Folder`
            used.add(key)
            if key not in ALLOWED:
                unknown[key] += 1
    assert not unknown, "go through usfan.files, or say here why not"
    assert not set(ALLOWED) - used, "no longer there"


def test_a_new_open_is_noticed(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "open('a')\nPath('b').write_text('c')\nimport os\nos.open('d', 0)\nnp.load('e')\n"
    )
    assert calls(file) == ["open", "write_text", "os.open", "np.load"]
