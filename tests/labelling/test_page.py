"""The page of `usfan label` through its web application: who may ask, what is saved, and what several windows see."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from label_runs import BROKEN, write_label_run
from werkzeug.test import TestResponse

from usfan.data.few_labels import JUDGE, NAME, NONE_OF_THESE, SKIP
from usfan.errors import ConfigError, DataError
from usfan.files import read_yaml, write_yaml
from usfan.labelling.again import SecondRun
from usfan.labelling.answers import Answer, read_answers
from usfan.labelling.server import MOST_BODY, Page, PageServer, create_app
from usfan.labelling.session import Session

PORT = 8123
TOKEN = "a-token-of-the-test"
ORIGIN = f"http://127.0.0.1:{PORT}"
FIRST = "window-one"
SECOND = "window-two"


class Window:
    """A tab, as the server sees it."""

    def __init__(self, client: FlaskClient, name: str = FIRST) -> None:
        self.client = client
        self.name = name

    def get(self, path: str) -> TestResponse:
        return self.client.get(f"/{TOKEN}/{path}", base_url=ORIGIN, buffered=True)

    def post(self, path: str, **body) -> TestResponse:
        return self.client.post(
            f"/{TOKEN}/{path}",
            json=body | {"window": self.name},
            base_url=ORIGIN,
            headers={"Origin": ORIGIN},
        )

    @property
    def state(self) -> dict:
        return self.get(f"state?window={self.name}").json

    def answer(self, row: int, label: str, kind: str = NAME) -> dict:
        response = self.post("answer", row=row, label=label, kind=kind)
        assert response.status_code == 200, response.text
        return response.json


def open_window(run: Path, ask: int | None = None) -> tuple[Session, Window]:
    session = Session(run, ask)
    return session, Window(create_app(Page(session, SecondRun(run)), PORT, TOKEN).test_client())


@pytest.fixture
def run(tmp_path) -> Path:
    return write_label_run(tmp_path / "run")[0]


@pytest.fixture
def session(run) -> Iterator[Session]:
    session = Session(run)
    yield session
    session.close()


@pytest.fixture
def window(run, session) -> Window:
    return Window(create_app(Page(session, SecondRun(run)), PORT, TOKEN).test_client())


def test_only_the_page_itself_is_answered(window, run):
    assert window.get("").status_code == 200
    client = window.client
    other_hosts = (
        "evil.example",
        "127.0.0.1:80",
        "localhost",
        f"127.0.0.1.evil.example:{PORT}",
    )
    for host in other_hosts:
        reply = client.get(f"/{TOKEN}/", base_url=f"http://{host}")
        assert reply.status_code == 403, host
    assert (
        client.get(f"/{TOKEN}/", base_url=f"http://localhost:{PORT}", buffered=True).status_code
        == 200
    )
    paths = (
        "/",
        "/state",
        "/page.js",
        "/image/0",
        "/wrong/",
        "/wrong/image/0",
        "/é/",
        f"/{TOKEN}x/",
    )
    for path in paths:
        assert client.get(path, base_url=ORIGIN).status_code == 403, path
    secret = run / "metrics.json"
    outside = ("../metrics.json", "..%2fmetrics.json", "image/../metrics.json", "session.py")
    absent = (
        f"image/{secret}",
        "image/..%2f..%2fmetrics.json",
        "image/-1",
        "image/48",
        "image/1.5",
    )
    for path in (*outside, *absent, f"image/{10**30}"):
        reply = window.get(path)
        assert reply.status_code in (403, 404), path
        assert "verdict" not in reply.text
    label = {"row": 0, "label": "class 0000", "kind": NAME, "window": FIRST}
    for origin in (
        None,
        "null",
        "http://evil.example",
        f"http://localhost:{PORT}",
        f"https://127.0.0.1:{PORT}",
    ):
        headers = {} if origin is None else {"Origin": origin}
        reply = client.post(f"/{TOKEN}/answer", json=label, base_url=ORIGIN, headers=headers)
        assert reply.status_code == 403, origin
    assert window.get("answer").status_code in (404, 405)
    assert not (run / "labels.csv").exists()


def test_requests_as_they_arrive(session, run):
    """To the server itself, where no client has cleaned the path or chosen the Host header."""
    server = PageServer(session, SecondRun(run))
    thread = threading.Thread(target=server.run)
    thread.start()
    token = server.address.split("/")[3]
    here = f"127.0.0.1:{server.port}"
    replies = {
        (f"/{token}/", here): 200,
        (f"/{token}/", "evil.example"): 403,
        (f"/{token}/", f"evil.example:{server.port}"): 403,
        ("/", here): 403,
        (f"/{token[:-1]}/", here): 403,
        (f"/x/../{token}/", here): 403,
        (f"/{token}/../{token}/state", here): 404,
        (f"/{token}/image/../../../metrics.json", here): 404,
        (f"/{token}/image/%2e%2e/%2e%2e/metrics.json", here): 404,
        (f"/{token}/..%2fserver.py", here): 404,
        (f"/{token}/../server.py", here): 404,
    }
    for (path, host), status in replies.items():
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            answer = connection.makefile("rb").read()
        assert answer.split()[1] == str(status).encode(), (path, host)
        assert status == 200 or b"verdict" not in answer
    server.server.trigger.pull_trigger(server.close)
    thread.join(30)
    assert not thread.is_alive()


def test_odd_requests_are_refused(window, run):
    assert window.post("answer", row=0, kind=NAME, label="x" * MOST_BODY).status_code == 413
    for row in (-1, 48, "0", None, True, 1.0, [0]):
        for action in ("answer", "undo"):
            reply = window.post(action, row=row, label="class 0000", kind=NAME)
            assert reply.status_code in (400, 404)
    for label in ("class 0009", "", None, 3):
        assert window.post("answer", row=0, label=label, kind=NAME).status_code == 400
    assert window.post("answer", row=0, label="class 0000", kind="else").status_code == 400
    headers = {"Origin": ORIGIN}
    for body, kind in (
        ("{", "application/json"),
        ("[1]", "application/json"),
        ("[" * 4000, "application/json"),
        ("row=0", "text/plain"),
    ):
        reply = window.client.post(
            f"/{TOKEN}/answer",
            data=body,
            content_type=kind,
            base_url=ORIGIN,
            headers=headers,
        )
        assert reply.status_code in (400, 415)
        assert "error" in reply.json
    assert window.get("state").status_code == 400
    assert not (run / "labels.csv").exists()


def test_the_page_runs_no_script_but_its_file(window):
    page = window.get("")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(
        r"<script(?! src=\"page.js\" defer></script>)|<style|\sstyle=|\son\w+=", page.text
    )
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css")):
        assert window.get(name).content_type.startswith(kind)
    image = window.get("image/0")
    assert image.content_type == "image/jpeg"
    assert image.data.startswith(b"\xff\xd8")


def test_an_answer_is_saved_at_once_and_the_next_session_goes_on(tmp_path):
    run, _ = write_label_run(tmp_path / "run", K=3)
    session, window = open_window(run)
    classes = window.get("classes").json["classes"]
    rows = []
    for number in range(5):
        (question, *_) = window.state["questions"]
        assert "path" not in json.dumps(question)
        rows.append(question["row"])
        label = classes[question["row"] % 3] if number else NONE_OF_THESE
        state = window.answer(question["row"], label, question["kind"])
        answers = read_answers(run / "labels.csv")
        assert [Path(a.image).name for a in answers] == [f"{row:03}.png" for row in rows]
    assert [a.question for a in answers] == [NAME] * 3 + [JUDGE] * 2
    assert answers[0].label == NONE_OF_THESE
    assert state["judged"] == 2
    assert "2 labels" in state["sentence"]
    session.close()
    again, window = open_window(run)
    state = window.state
    assert state["answers"] == 5
    assert state["questions"][0]["row"] not in rows
    assert state["questions"][0]["kind"] == JUDGE
    again.close()


def test_names_follow_the_answers(session, window):
    doubt = window.state["doubt"]
    for _ in range(2):
        question = window.state["questions"][0]
        window.answer(question["row"], f"class {question['row'] % 7:04}")
        session.learning.result(60)
    assert window.state["doubt"] != doubt
    assert not window.state["learning"]


def test_two_windows_show_two_images_and_the_first_answer_counts(window, run):
    other = Window(window.client, SECOND)
    row = window.state["questions"][0]["row"]
    second = other.state["questions"][0]["row"]
    assert row != second
    assert window.state["questions"][0]["row"] == row  # it stays, until it is answered
    assert window.answer(row, "class 0001")["note"] == ""
    late = other.answer(row, "class 0002")
    assert late["note"] == "another window has answered this one: class 0001"
    assert late["answers"] == 1
    assert late["questions"][0]["row"] == second
    assert [a.label for a in read_answers(run / "labels.csv")] == ["class 0001"]


def test_undo_shows_the_image_again(window, run):
    first = window.state["questions"][0]["row"]
    second = window.answer(first, "class 0001")["questions"][0]["row"]
    window.answer(second, SKIP)
    state = window.post("undo", row=first).json
    assert state["questions"][0]["row"] == first
    assert [a.label for a in read_answers(run / "labels.csv")] == [SKIP]
    window.answer(first, "class 0003")
    assert window.post("undo", row=window.state["last"]).json["questions"][0]["row"] == first
    state = window.post("undo", row=second).json
    assert state["questions"][0]["row"] == second
    assert (state["answers"], state["last"]) == (0, None)
    assert window.post("undo", row=second).json["answers"] == 0


def test_a_file_that_cannot_be_shown_is_skipped(window, session, run):
    reply = window.get(f"image/{BROKEN}")
    assert (reply.status_code, reply.text) == (415, "not an image of a known format")
    Path(session.images[2]).unlink()
    assert window.get("image/2").text == "no such file"
    window.answer(BROKEN, SKIP)
    assert read_answers(run / "labels.csv") == [Answer(session.images[BROKEN], SKIP)]


@pytest.mark.parametrize("classes", [31, 1000])
def test_many_classes(tmp_path, classes):
    run, _ = write_label_run(tmp_path / "run", N=64, K=classes, doubt=0.0)
    session, window = open_window(run)
    names = window.get("classes").json["classes"]
    assert len(names) == classes
    question = window.state["questions"][0]
    assert len(question["candidates"]) == 9
    state = window.answer(question["row"], names[-1], question["kind"])
    assert state["answers"] == 1
    session.close()


def test_a_session_is_done_when_it_is_decided_or_after_so_many_answers(run):
    session, window = open_window(run, ask=2)
    for done in (False, True):
        question = window.state["questions"][0]
        assert window.answer(question["row"], SKIP, question["kind"])["done"] == done
    session.close()
    session, window = open_window(run)
    state = window.state
    while not state["done"]:
        question = state["questions"][0]
        state = window.answer(
            question["row"], f"class {question['row'] % 7:04}", question["kind"]
        )
    assert state["verdict"] == "better" or not state["questions"]
    session.close()


def test_adapting_again_needs_the_source_model_and_the_data(window, run):
    adapt = window.post("adapt").json["adapt"]
    assert adapt["status"] == "idle"
    assert adapt["missing"] == "absent, absent"
    assert adapt["command"] == (
        f"usfan adapt --config {run}/config.yaml --labels {run}/labels.csv --out {run}-labelled"
    )


def test_a_run_is_open_once_and_its_images_must_be_here(run, session):
    with pytest.raises(ConfigError, match="another `usfan label` has"):
        Session(run)
    for image in session.images:
        Path(image).unlink()
    with pytest.raises(DataError, match="is on this machine"):
        session.must_have_images()


def test_adapting_again_repeats_what_no_config_file_may_set(run):
    config = read_yaml(run / "config.yaml")
    write_yaml(
        run / "config.yaml", config | {"root": "/data", "cache": "store", "budget": None}
    )
    assert SecondRun(run).command.endswith("--set root=/data --set cache=store")
    write_yaml(run / "config.yaml", config)


def test_mistakes_on_the_command_line(run, tmp_path, refused):
    assert "at least 1" in refused("label", run, "--ask", 0)
    assert "65535" in refused("label", run, "--port", 70000)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert "choose another --port" in refused("label", run, "--port", port)
    assert "is not a run of usfan adapt" in refused("label", tmp_path)
    image = read_image(run, 0)
    table = run / "labels.csv"
    table.write_text(f"path,label\n{image},class 0000\n{image},class 0001\n")
    said = refused("label", run)
    assert "labels.csv, line 3: " in said
    assert said.endswith("is class 0001 here and class 0000 before: keep one")
    table.write_text(f"path,label\n{image},clas 0001\n")
    assert "no class clas 0001: did you mean class 0001?" in refused("label", run)
    table.write_text("path,label\nelsewhere.png,class 0001\n")
    assert "elsewhere.png is not an image of this run" in refused("label", run)


def test_a_copied_run_is_refused_with_advice_that_the_command_takes(run, tmp_path, refused):
    line = refused("label", shutil.copytree(run, tmp_path / "copy"))
    assert "this run was not made here: label the folder that usfan adapt wrote" in line
    assert "--" not in line


def read_image(run: Path, row: int) -> str:
    return json.loads((run / "samples.json").read_text())["paths"][row]
