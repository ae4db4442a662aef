"""On a GPU: captured steps are eager steps, and it does not matter where the pixels lie."""

from __future__ import annotations

import pytest
import torch
from process_worker import CLASSES, pictures
from torch import Tensor

from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.passes import Feeder, forward_store, replayed_pass
from usfan.engine.runtime import Runtime, start_runtime
from usfan.engine.stepper import Stepper
from usfan.store.model import SourceModel
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
COMPILING = pytest.mark.filterwarnings("ignore")
"""torch warns of its own affairs while it compiles: of its old parts, of the precision that a test asks for."""
CUDA = torch.device("cuda", 0)
NAMES = [str(k) for k in range(CLASSES)]


def store(count: int = 157, where: str = "device") -> Store:
    pixels, labels = pictures(count, 0)
    pixels = pixels.to(CUDA) if where == "device" else pixels.pin_memory()
    return Store(pixels, torch.arange(count), labels, tuple(NAMES))


def trained(engine: Runtime, data: Store) -> SourceModel:
    """Two epochs of five batches of 32: ten steps, of which the fast path captures some."""
    settings = {
        "backbone": "smooth",
        "epochs": 2,
        "batch_size": 32,
        "bottleneck": 16,
        "augment": "resized-crop",
    }
    return train_source(data, runtime=engine, **settings)


def largest_difference(one: SourceModel, two: SourceModel) -> float:
    a = one.classifier.state_dict()
    b = two.classifier.state_dict()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def exact(compile: str = "off") -> Runtime:
    """Without TF32, which rounds by the algorithm chosen: that differs between the paths."""
    engine = start_runtime(RuntimeConfig(device="cuda", precision="32", compile=compile))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.fp32_precision = "ieee"
    return engine


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were captured."""
    seen: list[int] = []
    plain = Stepper._record

    def record(self: Stepper, inputs: tuple[Tensor, ...]) -> Tensor:
        result = plain(self, inputs)
        seen.extend(self.graphs)
        return result

    monkeypatch.setattr(Stepper, "_record", record)
    return seen


@pytest.mark.parametrize("where", ["device", "host"])
def test_captured_training_is_eager_training(where: str, captures: list[int]) -> None:
    eager = trained(exact(), store())
    assert captures == []
    fast = trained(exact("graph"), store(where=where))
    assert captures == [32]
    assert largest_difference(eager, fast) < 1e-5
    assert fast.posterior.prior_precision == pytest.approx(
        eager.posterior.prior_precision, rel=1e-4
    )


@pytest.mark.parametrize(
    "settings", [{"refresh": "epoch"}, {"refresh": "step"}, {"open_set": True}], ids=str
)
def test_captured_adaptation_is_eager_adaptation(settings: dict, captures: list[int]) -> None:
    source = trained(exact(), store())
    target = Store(pictures(151, 1, shift=3)[0].to(CUDA), torch.arange(151))
    options = {"method": "u-sfan+", "epochs": 2, "batch_size": 32, "guard": False, **settings}
    eager = adapt(source, target, runtime=exact(), **options)
    fast = adapt(source, target, runtime=exact("graph"), **options)
    assert sorted(captures) == [32, 64]  # the step, and the batch of a pass
    assert largest_difference(eager, fast) < 1e-5
    assert largest_difference(eager, source) > 1e-3
    assert torch.equal(eager.passes.after.probs.argmax(1), fast.passes.after.probs.argmax(1))


def test_a_step_that_cannot_be_captured_goes_on_eagerly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = exact("graph")
    stepper = Stepper(lambda values: values.sum() * float(values.sum()), engine, 1000)
    values = torch.arange(4.0, device=CUDA)
    assert [float(stepper(values)) for _ in range(6)] == [36.0] * 6
    assert "runs eagerly" in caplog.text
    assert stepper.graphs == {}


def test_the_gpu_trains_as_the_cpu_does() -> None:
    pixels, labels = pictures(157, 0)
    host = Store(pixels, torch.arange(157), labels, tuple(NAMES))
    on_cpu = trained(Runtime(torch.device("cpu")), host)
    on_gpu = trained(exact(), store())
    on_gpu.to("cpu")
    assert largest_difference(on_cpu, on_gpu) < 1e-4


def test_pixels_on_the_device_or_staged_from_the_host() -> None:
    engine = exact()
    spec = InputSpec(1, 28, 28, (0.5,), (0.5,), "resized-crop-flip")
    resident = Feeder(store(), spec, 3, engine)
    staged = Feeder(store(where="host"), spec, 3, engine)
    assert (resident.resident, staged.resident) == (True, False)
    samples = torch.tensor([5, 150, 5, 0])
    assert [len(feeder.inputs(samples)) for feeder in (resident, staged)] == [1, 2]
    views = [feeder.view(*feeder.inputs(samples)) for feeder in (resident, staged)]
    assert views[0].device == CUDA
    assert torch.equal(*views)


def test_a_pass_over_pixels_on_the_device_or_the_host() -> None:
    engine = exact()
    model = trained(engine, store())
    found = [
        forward_store(model.classifier, store(where=w), model.spec, engine)
        for w in ("device", "host")
    ]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_bf16_is_close_and_features_are_float32() -> None:
    model = trained(exact(), store())
    half = Runtime(CUDA, precision="bf16")
    exact_features, exact_logits = forward_store(model.classifier, store(), model.spec, exact())
    features, logits = forward_store(model.classifier, store(), model.spec, half)
    assert features.dtype == logits.dtype == torch.float32
    assert float((features - exact_features).abs().mean()) < 0.02 * float(
        exact_features.abs().mean()
    )
    assert float((logits.argmax(1) == exact_logits.argmax(1)).float().mean()) > 0.9


@COMPILING
def test_a_compiled_pass_is_the_eager_one() -> None:
    engine = exact("on")
    settings = {"backbone": "resnet18", "pretrained": "none", "epochs": 1, "batch_size": 64}
    pixels = torch.randint(0, 256, (150, 3, 256, 256), dtype=torch.uint8, device=CUDA)
    data = Store(pixels, torch.arange(150), torch.arange(150) % CLASSES, tuple(NAMES))
    model = train_source(data, runtime=engine, **settings)
    expected, _ = forward_store(model.classifier, data, model.spec, engine)
    replay = replayed_pass(model.classifier, data, model.spec, engine, 100)
    found, _ = forward_store(model.classifier, data, model.spec, engine, replay=replay)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-3 * float(expected.abs().max())


def test_what_is_left_after_whole_batches_is_padded_and_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = exact()
    model = trained(engine, store())
    data = store(150)
    monkeypatch.setattr("usfan.engine.passes.PASS_BATCH", 70)
    features, logits = forward_store(model.classifier, data, model.spec, engine)
    monkeypatch.setattr("usfan.engine.passes.PASS_BATCH", 150)
    whole, _ = forward_store(model.classifier, data, model.spec, engine)
    assert features.shape[0] == logits.shape[0] == 150
    assert float((features - whole).abs().max()) < 1e-3 * float(
        whole.abs().max()
    )  # kernels differ with the size
