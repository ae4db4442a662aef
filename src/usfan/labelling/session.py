"""A session of labelling: the board of a run, its labels.csv, and which window shows which image.

An answer is on the disk before the call returns, so that a session can end at any moment. Names move in a thread of
their own, because they take seconds with many images; the next question comes from the names as they are by then. A
lock lets several windows answer, and no two of them show the same image.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from usfan.adaptation.verdict import measured_verdict
from usfan.data.decoding.decode import one_line
from usfan.data.few_labels import NAME
from usfan.errors import ConfigError, DataError
from usfan.files import Folder
from usfan.labelling.answers import ANSWERS_FILE, Answer, write_answers
from usfan.labelling.board import Board, Question
from usfan.labelling.questions import answers_in
from usfan.labelling.target import LabelTarget
from usfan.maths.agreement import Interval
from usfan.metrics.stored_images import read_mapping

LOCK = ".labels.lock"
ABSENCE = 90.0
"""Seconds without a word from a window after which others may show its image."""


class Session:
    """Questions to the user, from one or several windows."""

    def __init__(self, run: Path, ask: int | None = None) -> None:
        """`ask`: questions until the session counts as done; by default until it is decided which model is better."""
        self.run = run
        self.ask = ask
        self.board = Board(LabelTarget.of_run(run))
        for answer in answers_in(run):
            self.board.add(answer)
        with Folder(run) as folder:
            verdict = read_mapping(folder, "metrics.json", []).get("verdict")
            try:
                self.handle = folder.lock(LOCK)
            except BlockingIOError:
                raise ConfigError(
                    f"another `usfan label` has {run} open: use the address that it printed"
                ) from None
        self.sentence = str(verdict.get("sentence", "")) if isinstance(verdict, dict) else ""
        """The verdict of the adaptation, until labels speak."""
        self.count = 0
        """Answers since the session began."""
        self.windows: dict[str, tuple[Question, float]] = {}
        """The question of each tab of a browser, and when the tab was last heard of."""
        self.lock = threading.RLock()
        self.thread = ThreadPoolExecutor(1)
        self.learning: Future[None] | None = None
        if len(self.board.name_labels):
            self.learn()

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        os.close(self.handle)

    @property
    def images(self) -> tuple[str, ...]:
        return self.board.target.images

    def must_have_images(self) -> None:
        """Refuse a run none of whose images is on this machine."""
        if not any(map(os.path.isfile, self.images)):
            raise DataError(
                f"none of the images of {self.run} is on this machine, the first should be {one_line(self.images[0])}: "
                "label where they are, or bring them back to their folder"
            )

    def answer(self, answer: Answer) -> str:
        """Save an answer. The first one about an image counts; a window that says something else gets a note."""
        with self.lock:
            label = self.board.label_of(answer.image)
            if label is not None:
                same = label == answer.label
                return "" if same else f"another window has answered this one: {label}"
            before = self.board.answers
            self.board.add(answer)
            self.save(before, answer)
            self.count += 1
        return ""

    def undo(self, window: str, row: int) -> None:
        """Take back the answer about an image, if there is one, and show the image again."""
        with self.lock:
            before = self.board.answers
            for answer in [one for one in before if one.image == self.images[row]]:
                self.board.answers = [one for one in before if one != answer]
                self.save(before, answer)
                self.count = max(self.count - 1, 0)
                question = self.board.question(row, answer.question)
                self.windows[window] = (question, time.monotonic())

    def save(self, before: list[Answer], change: Answer) -> None:
        """Write labels.csv; if that fails, the board is as before."""
        try:
            write_answers(self.run / ANSWERS_FILE, self.board.answers)
        except OSError:
            self.board.answers = before
            raise
        if change.question == NAME:
            self.learn()

    def learn(self) -> None:
        """Let the names follow the answers, in the other thread; of several calls that wait, one is enough."""
        if self.learning is not None:
            self.learning.cancel()
        self.learning = self.thread.submit(self.learn_now)

    def learn_now(self) -> None:
        with self.lock:
            labels = self.board.name_labels
        naming = self.board.target.naming(labels)
        with self.lock:
            self.board.take(naming)

    def questions_for(self, window: str) -> list[Question]:
        """The question of a window, and the one that may follow it."""
        now = time.monotonic()
        self.windows = {
            name: (question, moment)
            for name, (question, moment) in self.windows.items()
            if now - moment < ABSENCE and self.board.label_of(question.image) is None
        }
        present = self.windows.pop(window, None)
        taken = {question.row for question, _ in self.windows.values()}
        free = [q for q in self.board.questions(len(taken) + 2) if q.row not in taken]
        if present is not None:
            free = [present[0], *(q for q in free if q.row != present[0].row)]
        if free:
            self.windows[window] = (free[0], now)
        return free[:2]

    def state(self, window: str) -> dict[str, object]:
        """Everything that the page shows, for JSON."""
        with self.lock:
            board = self.board
            questions = self.questions_for(window)
            comparison = board.comparison
            decision = comparison.decision
            sentence = (
                measured_verdict(comparison).sentence if comparison.answers else self.sentence
            )
            sentence += board.exchange_note
            done = board.names_left == 0 and decision.value != "not yet"
            if self.ask is not None:
                done = self.count >= self.ask
            return {
                "questions": [for_page(question) for question in questions],
                "answers": len(board.answers),
                "last": board.rows[board.answers[-1].image] if board.answers else None,
                "named": sum(answer.question == NAME for answer in board.answers),
                "names": board.names,
                "names_left": board.names_left,
                "doubt": 100 * board.doubt,
                "learning": self.learning is not None and not self.learning.done(),
                "verdict": decision.value,
                "sentence": sentence,
                "judged": comparison.answers,
                "more": board.names_left + decision.more,
                "source": ends(comparison.source),
                "adapted": ends(comparison.adapted),
                "difference": ends(decision.difference),
                "done": done,
            }


def for_page(question: Question) -> dict[str, object]:
    """Without the file's name, which may give an answer away."""
    return {"row": question.row, "kind": question.kind, "candidates": question.candidates}


def ends(interval: Interval) -> list[float]:
    """Value, low and high in percent."""
    return [100 * end for end in (interval.value, interval.low, interval.high)]
