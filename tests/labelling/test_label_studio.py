"""Round trips with Label Studio: tasks out, an export of annotations in."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from label_runs import write_label_run

from small_runs import usfan
from usfan.data.few_labels import NONE_OF_THESE, SKIP
from usfan.labelling.answers import read_answers


@pytest.fixture
def run(tmp_path) -> Path:
    return write_label_run(tmp_path / "run")[0]


def annotated(task: dict, *labels: str, cancelled: bool = False) -> dict:
    """The task as Label Studio exports it, annotated by one person per label; an empty label is a skip."""
    annotations = []
    for person, label in enumerate(labels):
        result = {
            "id": f"region-{person}",
            "from_name": "label",
            "to_name": "image",
            "type": "choices",
            "origin": "manual",
            "value": {"choices": [label]},
        }
        annotation = {
            "id": 1000 + person,
            "completed_by": person + 1,
            "result": [result] if label else [],
            "was_cancelled": cancelled or not label,
            "ground_truth": False,
            "created_at": "2026-01-02T03:04:05.678901Z",
            "lead_time": 2.5,
            "task": 1,
            "result_count": 1,
        }
        annotations.append(annotation)
    skips = sum(a["was_cancelled"] for a in annotations)
    return {
        "id": 1,
        "data": task["data"],
        "annotations": annotations,
        "predictions": [],
        "drafts": [],
        "meta": {},
        "project": 1,
        "total_annotations": len(annotations) - skips,
        "cancelled_annotations": skips,
    }


def test_tasks_out_and_annotations_in(run, tmp_path, capsys):
    file = tmp_path / "tasks.json"
    assert usfan("label", run, "--tasks", file) == 0
    tasks = json.loads(file.read_text())
    assert {t["data"]["question"] for t in tasks} == {"name", "judge"}
    for task in tasks:
        data = task["data"]
        assert data["image"] == f"/data/local-files/?d={Path(data['path']).name}"
        assert ("predictions" in task) == (data["question"] == "name")
    (guess,) = tasks[0]["predictions"][0]["result"]
    choices = [c.get("value") for c in ElementTree.parse(tmp_path / "tasks.xml").iter("Choice")]
    assert guess["value"]["choices"][0] in choices
    assert choices[-1] == NONE_OF_THESE
    said = capsys.readouterr().err.replace("\n", "")
    assert f"DOCUMENT_ROOT={Path(tasks[0]['data']['path']).parent}" in said

    export = tmp_path / "export.json"
    labels = ["class 0003", NONE_OF_THESE, "class 0001"]
    filled = [annotated(t, label) for t, label in zip(tasks, labels, strict=False)]
    filled += [annotated(tasks[3], "class 0001", cancelled=True), annotated(tasks[4])]
    export.write_text(json.dumps(filled))
    assert usfan("label", run, "--annotations", export) == 0
    assert "4 answers in" in capsys.readouterr().err
    answers = read_answers(run / "labels.csv")
    assert [a.label for a in answers] == [*labels, SKIP]
    assert [a.image for a in answers] == [t["data"]["path"] for t in tasks[:4]]
    assert usfan("label", run, "--annotations", export) == 0  # nothing new
    assert read_answers(run / "labels.csv") == answers


def test_several_annotators(run, tmp_path, refused):
    """A skip gives way to a label; two labels of one image are a mistake that names the image."""
    file = tmp_path / "tasks.json"
    usfan("label", run, "--tasks", file, "--ask", 4)
    tasks = json.loads(file.read_text())
    people = [("class 0001", "class 0001"), ("", "class 0002"), ("class 0003", ""), ("", "")]
    file.write_text(json.dumps([annotated(t, *p) for t, p in zip(tasks, people, strict=True)]))
    assert usfan("label", run, "--annotations", file) == 0
    labels = [a.label for a in read_answers(run / "labels.csv")]
    assert labels == ["class 0001", "class 0002", "class 0003", SKIP]
    file.write_text(json.dumps([annotated(tasks[0], "class 0001", "", "class 0002")]))
    said = refused("label", run, "--annotations", file)
    assert Path(tasks[0]["data"]["path"]).name in said
    assert "is class 0001 and class 0002: keep one" in said


def test_annotations_that_cannot_be_taken(run, tmp_path, refused):
    file = tmp_path / "tasks.json"
    usfan("label", run, "--tasks", file, "--ask", 2)
    first, second = json.loads(file.read_text())
    call = ("label", run, "--annotations", file)
    file.write_text(json.dumps([annotated(first, "class 0001", "class 0002")]))
    assert "is class 0001 and class 0002: keep one" in refused(*call)
    file.write_text(json.dumps([annotated(first, "clas 0001")]))
    assert "did you mean class 0001?" in refused(*call)
    file.write_text(
        json.dumps([annotated(first, "class 0001"), annotated(second, "class 0001")])
    )
    assert usfan(*call) == 0
    file.write_text(json.dumps([annotated(first, "class 0002")]))
    assert "is class 0002 in" in refused(*call)
    for content in (
        "[1]",
        '[{"data": {}}]',
        '{"a": 1}',
        "[",
        '[{"data": {"path": "x"}, "annotations": [{"result": 3}]}]',
    ):
        file.write_text(content)
        refused(*call)
    assert "cannot be read" in refused("label", run, "--annotations", tmp_path / "absent.json")
    assert len(read_answers(run / "labels.csv")) == 2
