"""A real Jupyter kernel: progress is shown and renews itself, a model is a few lines, figures show themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupyter_client as client
import pytest

TESTS = Path(__file__).resolve().parent
ADAPT = """
import numpy as np, usfan
from tiny_models import tiny_model
from usfan import progress
progress.PATIENCE = 0.0
pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
target = usfan.adapt(tiny_model(), pixels, epochs=2, batch_size=8, guard=False{more})
"""


@pytest.fixture(scope="module")
def run():
    """Runs a cell; gives its messages (kind, content)."""
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager = client.KernelManager()
    manager._kernel_spec = client.kernelspec.KernelSpec(
        argv=command, display_name="usfan", language="python"
    )
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), *filter(None, sys.path)])
    manager.start_kernel(env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    kernel = manager.client()
    kernel.start_channels()
    kernel.wait_for_ready(timeout=60)

    def cell(code: str) -> list[tuple[str, dict]]:
        number = kernel.execute(code)
        found = []
        while True:
            message = kernel.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != number:
                continue
            kind = message["msg_type"]
            content = message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind not in ("status", "execute_input"):
                found.append((kind, content))

    yield cell
    kernel.stop_channels()
    manager.shutdown_kernel(now=True)


def test_the_hour_in_a_notebook(run, tmp_path):
    shown = run(ADAPT.format(more=""))
    kinds = {kind for kind, _ in shown}
    assert "error" not in kinds, shown
    assert {"display_data", "update_display_data"} <= kinds
    last = [content["data"] for kind, content in shown if kind == "update_display_data"][-1]
    assert last["text/plain"].startswith("adapting: 80 of 80 images, epoch 2 of 2, loss")
    assert "<progress" in last["text/html"]
    assert run(ADAPT.format(more=", progress=False")) == []
    told = run(ADAPT.format(more=f", progress=True, run={str(tmp_path / 'run')!r}"))
    assert {kind for kind, _ in told} == {"display_data", "update_display_data"}, told
    assert {"metrics.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }

    ((kind, content),) = run("target")
    assert kind == "execute_result"
    assert len(content["data"]["text/plain"]) < 300
    page = content["data"]["text/html"]
    assert page.startswith("<p>")
    assert page.endswith("</table>")
    ((_, content),) = run("usfan.figures.entropy_densities(target)")
    assert "image/png" in content["data"]
