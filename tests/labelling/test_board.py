"""Questions and answers about a target, as a user meets them: in memory, in a run folder, and again later."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from label_runs import write_label_run
from safetensors.torch import load_file, save_file

import usfan
from small_runs import adapt_tiny, class_folder, train_tiny
from usfan.data.few_labels import NONE_OF_THESE, SKIP
from usfan.errors import ConfigError, DataError, UsfanError
from usfan.labelling.again import SecondRun
from usfan.labelling.answers import Answer, read_answers, write_answers
from usfan.labelling.board import Board
from usfan.labelling.questions import open_board
from usfan.labelling.target import LabelTarget
from usfan.maths.names import View
from usfan.maths.neighbours import nearest_neighbours


def make_target(doubt: float = 0.5, count: int = 200) -> tuple[LabelTarget, torch.Tensor]:
    """Five clusters, of which the source model confuses two, and the truth."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(count) % 5
    points = 6 * torch.eye(5, 8)[truth] + torch.randn(count, 8, generator=generator)
    names = torch.full((count, 5), 0.05).double()
    names[torch.arange(count), truth] = 0.8
    names[truth < 2, :2] = 0.425
    view = View(points, nearest_neighbours(points, 8)[0], 8)
    before = torch.where(truth < 2, torch.arange(count) // 5 % 2, truth)
    after = torch.where(truth < 2, 1 - truth, truth)  # the two names are swapped
    images = tuple(f"/photos/{number}.jpg" for number in range(count))
    classes = ("ant", "bee", "cat", "dog", "elk")
    return LabelTarget(classes, images, view, names, "closed", before, after, doubt), truth


def answer(board: Board, truth: torch.Tensor, count: int) -> list[str]:
    """True answers to so many questions, and the kinds that were asked."""
    kinds = []
    for _ in range(count):
        (question,) = board.questions(1)
        label = board.target.classes[int(truth[question.row])]
        board.add(Answer(question.image, label, question.kind))
        board.update()
        kinds.append(question.kind)
    return kinds


def test_names_come_first_if_they_are_in_doubt_then_judgements():
    target, truth = make_target()
    board = Board(target)
    assert board.names_left == 5
    assert answer(board, truth, 9) == ["name"] * 5 + ["judge"] * 4
    some, truth = make_target(doubt=0.1)  # half as many names
    assert answer(Board(some), truth, 3) == ["name", "name", "judge"]
    clear, truth = make_target(doubt=0.0)
    assert answer(Board(clear), truth, 3) == ["judge"] * 3
    assert answer(Board(clear, names=2), truth, 3) == ["name", "name", "judge"]


def test_names_in_doubt_are_asked_about_first():
    target, truth = make_target()
    asked = Board(target, names=2).questions(2)
    assert all(truth[question.row] < 2 for question in asked)
    assert set(asked[0].candidates[:2]) == {"ant", "bee"}
    assert len(asked[0].candidates) == 5


def test_candidates_of_a_comparison_favour_no_model():
    """With many classes too, both predictions can be chosen, and they come in the order of the classes."""
    target, _ = make_target(doubt=0.0)
    classes = tuple(f"class {k:02}" for k in range(20))
    names = torch.cat([target.names, torch.full((200, 15), 0.01).double()], dim=1)
    before = torch.full_like(target.before, 19)
    many = dataclasses.replace(target, classes=classes, names=names, before=before)
    for question in Board(many).questions(5):
        assert question.kind == "judge"
        assert len(question.candidates) == 9
        assert list(question.candidates) == sorted(question.candidates)
        after = classes[int(target.after[question.row])]
        assert {"class 19", after} <= set(question.candidates)


def test_exchanged_names_are_said_after_a_few_answers():
    """The adapted model calls ants bees and bees ants. Other mistakes are not called that."""
    target, truth = make_target()
    board = Board(target)
    numbers = [
        number for number in range(1, 16) if answer(board, truth, 1) and board.exchange_note
    ]
    assert 3 <= numbers[0] <= 12
    assert "exchange ant and bee" in board.exchange_note
    good, truth = make_target()
    board = Board(dataclasses.replace(good, after=truth))
    answer(board, truth, 15)
    assert board.exchange_note == ""


def test_answers_settle_names_and_judge():
    """Judgements find that two names were swapped; names put them right."""
    target, truth = make_target()
    board = Board(target)
    assert (board.soft_labels.argmax(1) == truth).double().mean() < 0.85
    answer(board, truth, 5)
    assert (board.soft_labels.argmax(1) == truth).double().mean() > 0.95
    answer(board, truth, 30)
    comparison = board.comparison
    assert comparison.decision.value == "worse"
    share = float((target.after == truth).double().mean())
    assert comparison.adapted.low <= share <= comparison.adapted.high


def test_an_image_is_asked_about_once():
    target, truth = make_target(count=40)
    board = Board(target)
    answer(board, truth, 40)
    assert len({a.image for a in board.answers}) == 40
    assert board.questions(3) == []


def test_skip_none_of_these_and_a_second_thought():
    target, _ = make_target()
    board = Board(target)
    first, second, third = board.questions(3)
    board.add(Answer(first.image, SKIP))
    board.add(Answer(second.image, NONE_OF_THESE))
    board.update()
    assert {first.row, second.row}.isdisjoint(q.row for q in board.questions(20))
    board.add(Answer(third.image, "cat"))
    board.add(Answer(third.image, "dog"))  # a second thought
    assert [a.label for a in board.answers] == [SKIP, NONE_OF_THESE, "dog"]
    assert board.label_of(third.image) == "dog"
    assert board.label_of("/elsewhere.jpg") is None
    for wrong, said in (
        (Answer("/elsewhere.jpg", "cat"), "is not an image of this run"),
        (Answer(first.image, "cow"), "no class cow"),
    ):
        with pytest.raises(DataError, match=said):
            board.add(wrong)


def test_the_table_of_answers(tmp_path):
    answers = [Answer("/a b.jpg", "cat"), Answer('/c,"d".jpg', NONE_OF_THESE, "judge")]
    write_answers(tmp_path / "labels.csv", answers)
    assert read_answers(tmp_path / "labels.csv") == answers
    (tmp_path / "old.csv").write_text("path,label\n/a.jpg,cat\n/b.jpg,\n/a.jpg,cat\n")
    assert read_answers(tmp_path / "old.csv") == [Answer("/a.jpg", "cat")]
    (tmp_path / "both.csv").write_text("path,label\n/a.jpg,cat\n/b.jpg,\n/a.jpg,dog\n")
    with pytest.raises(DataError, match=r"line 4: .*is dog here and cat before: keep one"):
        read_answers(tmp_path / "both.csv")
    (tmp_path / "off.csv").write_text("path,label,question\n/a.jpg,cat,perhaps\n")
    with pytest.raises(DataError, match="line 2: question must be name or judge"):
        read_answers(tmp_path / "off.csv")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder of an adaptation to 24 pictures."""
    folder = tmp_path_factory.mktemp("labels")
    source = train_tiny(class_folder(folder / "source"), folder / "model")
    target = class_folder(folder / "target", domain=2)
    return adapt_tiny(source, target, folder / "run", "--guard", "off")


def test_questions_of_a_saved_run_and_answers_that_teach_the_next(run, tmp_path, refused):
    rows = list(csv.DictReader((run / "label_first.csv").read_text().splitlines()))
    assert [row["question"] for row in rows[:3]] == ["name"] * 3
    assert {row["question"] for row in rows[3:]} <= {"judge"}
    asked = usfan.questions(run)
    assert [question.image for question in asked][:3] == [row["path"] for row in rows][:3]
    board = open_board(run)
    for question in asked[:3]:
        board.add(Answer(question.image, Path(question.image).parent.name, question.kind))
    write_answers(run / "labels.csv", board.answers)
    assert {q.image for q in usfan.questions(run, 9)}.isdisjoint(q.image for q in asked[:3])
    data = Path(asked[0].image).parent.parent
    source = run.parent / "model"
    again = adapt_tiny(
        source, data, tmp_path / "again", "--guard", "off", "--labels", run / "labels.csv"
    )
    assert read_answers(again / "labels.csv") == sorted(board.answers, key=lambda a: a.image)
    with pytest.raises(ConfigError, match="at least 1"):
        usfan.questions(run, 0)


def test_any_number_of_questions_about_a_saved_run(run):
    """From its path: each image at most once, all of them if there are no more, and others after answers."""
    (run / "labels.csv").unlink(missing_ok=True)
    for count in (None, 1, 7, 1000):
        images = [question.image for question in usfan.questions(str(run), count)]
        assert len(images) == len(set(images))
        assert len(images) == min(count or len(images), 24)
    every = usfan.questions(run, 1000)
    answers = [Answer(q.image, Path(q.image).parent.name, q.kind) for q in every[:20]]
    write_answers(run / "labels.csv", answers)
    rest = [question.image for question in usfan.questions(run, 1000)]
    (run / "labels.csv").unlink()
    assert sorted([*rest, *(a.image for a in answers)]) == sorted(q.image for q in every)


def test_the_same_adaptation_with_the_answers(run):
    """As the page's button does it: a child process with the settings of the run, and labels.csv."""
    data = Path(usfan.questions(run, 1)[0].image).parent.parent
    image = data / "class-0" / "000.png"
    write_answers(run / "labels.csv", [Answer(str(image), "class-0")])
    second = SecondRun(run)
    assert second.state()["status"] == "idle"
    second.start()
    second.start()  # nothing: it runs
    assert second.state()["status"] == "running"
    second.child.wait(200)
    state = second.state()
    assert state["status"] == "done", state
    assert second.out == run.with_name("run-labelled")
    metrics = json.loads((second.out / "metrics.json").read_text())
    assert metrics["labels"]["count"] == 1
    assert state["line"].startswith(metrics["verdict"]["sentence"])
    settings, before = (
        yaml.safe_load((f / "config.yaml").read_text()) for f in (second.out, run)
    )
    assert settings | {"labels": None} == before
    assert SecondRun(run).out == run.with_name("run-labelled-2")
    second.close()


def test_runs_that_cannot_ask(run, tmp_path):
    for folder, said in ((run.parent / "model", "is not a run of usfan adapt"),):
        with pytest.raises(DataError, match=said):
            usfan.questions(folder)
    source = usfan.SourceModel.load(run.parent / "model")
    with pytest.raises(DataError, match="does not hold what it saw"):
        usfan.questions(usfan.AdaptedModel(**vars(source)))


def test_a_run_that_somebody_changed(tmp_path):
    path, _ = write_label_run(tmp_path / "run")
    secret = tmp_path / "secret.csv"
    secret.write_text("path,label\nmine,mine\n")
    (path / "labels.csv").symlink_to(secret)
    with pytest.raises(UsfanError, match="links are not followed") as caught:
        usfan.questions(path)
    assert "mine" not in str(caught.value)
    (path / "labels.csv").unlink()
    tensors = load_file(path / "samples.safetensors")
    for name in ("view", "near"):
        save_file(tensors | {name: tensors[name][:, 0].clone()}, path / "samples.safetensors")
        with pytest.raises(DataError, match=f"{name} has shape"):
            usfan.questions(path)
