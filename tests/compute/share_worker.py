"""One of several processes that share a pass: `main`."""

import json
from pathlib import Path

import torch

from usfan.artifacts.model import SourceModel
from usfan.compute.runtime import Runtime
from usfan.compute.share import gather_json, own_share
from usfan.data.sources import ImageData
from usfan.errors import UsfanError
from usfan.evaluation.evaluate import evaluate, run_over
from usfan.evaluation.predictions import write_predictions


def refusal(call, *arguments, **options) -> str:
    try:
        call(*arguments, **options)
    except (UsfanError, OSError) as error:
        return str(error)
    return "no refusal"


def main(rank: int, world: int, meeting: Path, source: Path, data: Path, out: Path) -> None:
    model = SourceModel.load(source)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    runtime = Runtime(torch.device("cpu"), workers=0, rank=rank, world=world)
    images = ImageData(data)
    found = {"metrics": evaluate(model, images, batch_size=16, runtime=runtime)}
    found["skipped"] = sorted(images.unreadable)
    found["positions"] = run_over(model, images, 16, runtime)[1].tolist()
    found["rows"] = write_predictions(out / "table.csv", model, ImageData(data), 0.5, runtime)
    # The broken files lie in the shares of different processes, and one process can read nothing at all.
    strict = ImageData(data, strict=True)
    found["strict"] = [
        refusal(evaluate, model, strict.subset(part), runtime=runtime, batch_size=2)
        for part in ([0, 2, 3, 4], [3, 4, 0, 5])
    ]
    found["strict table"] = refusal(write_predictions, out / "none.csv", model, strict, runtime=runtime)
    half = ImageData(data).subset([0, 0, 3, 4])
    found["half"] = run_over(model, half, 2, runtime)[1].tolist()
    found["none"] = refusal(run_over, model, half.subset([0, 1]), 1, runtime)
    found["none table"] = refusal(write_predictions, out / "none.csv", model, half.subset([0, 1]), runtime=runtime)
    found["unwritable"] = refusal(write_predictions, Path("/proc/none/a.csv"), model, half, runtime=runtime)
    found["json"] = gather_json({"rank": rank, "long": "é\udc80" * rank * 10}, runtime)
    found["gathered"] = runtime.gathered(torch.full((rank, 2), rank)).tolist()
    found["share"] = list(own_share(100, 16, runtime))
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
